"""What several files of tests share: references, models, tables of settings."""
