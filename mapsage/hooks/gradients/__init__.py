"""Hooks that look at losses and gradients."""
