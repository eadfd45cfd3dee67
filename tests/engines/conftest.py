"""Engines that are front doors: ``bash scripts/run_tests.sh --leg engines``."""
