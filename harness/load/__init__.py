"""The load generator: an absolute schedule, a lean HTTP client, rows streamed to Parquet."""
