"""The generator of synthetic aerial scenes that the demo trains on."""
