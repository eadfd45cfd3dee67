"""From the archives of a data provider to the folders that the dataset classes read."""
