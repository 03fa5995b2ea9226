"""Schedules as data: what each rank does when, and what that costs. No torch."""
