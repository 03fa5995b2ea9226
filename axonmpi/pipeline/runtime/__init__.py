"""The executor of schedules: stages, messages between them, and both halves of backward."""
