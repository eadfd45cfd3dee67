"""Maps of whole scenes: windows, blending, georeferenced output."""
