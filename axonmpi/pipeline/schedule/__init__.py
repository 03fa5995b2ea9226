"""Schedules as data: the actions of each rank in order, and their simulated times. No torch."""
