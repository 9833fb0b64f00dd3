"""What was measured: schemas, recorder, metric definitions, summary, comparison, history, report."""
