"""Training on images without labels: an averaged teacher, two views, and what joins them."""
