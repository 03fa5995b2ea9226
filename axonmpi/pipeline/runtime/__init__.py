"""What runs a schedule: stages, messages between them, both halves of backward."""
