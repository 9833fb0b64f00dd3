"""The HTML report of one or more runs: data, charts, readings and page, in this order."""
