"""What moves a policy while it runs: threshold in seconds, roles in minutes."""
