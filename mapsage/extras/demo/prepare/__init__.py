"""Conversion of a data provider's archives to the folders that the dataset classes read.

`archives.py` runs a conversion and can resume it, `layouts.py` describes the supported datasets,
`source_files.py` reads files in and out of archives, and `tiling.py` cuts large images.
"""
