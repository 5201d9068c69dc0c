"""One loop that trains every method: settings, schedules, checkpoints, model folders."""
