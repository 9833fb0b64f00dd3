"""What a configuration becomes in each mode: instances, links and the view over them."""
