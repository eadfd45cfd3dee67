"""Hooks around gradients: errors of NaN losses, accumulation cycles, and the record of a step."""
