"""What was measured: schemas, recorder, metrics, summary, comparison, history, report."""
