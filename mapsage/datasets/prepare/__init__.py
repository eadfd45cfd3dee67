"""Conversion of a data provider's archives to the folders that the dataset classes read."""
