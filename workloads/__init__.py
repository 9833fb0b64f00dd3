"""What arrives: requests, lengths, arrivals, prefix reuse, trace readers, scaling."""
