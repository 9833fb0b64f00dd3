"""More than one machine: workers and sweeps placed by Ray. Nothing else imports ray."""
