"""Export of a model as one ONNX file: traced, rewritten for old runtimes, described, and proved.

The order of work: `module.py` wraps the segmentor, `rewrites.py` replaces operations that ONNX
lacks, `graph.py` traces and cleans the graph, `metadata.py` describes the file, `proof.py`
compares it with the model. `proved_file.py` calls them in this order for
`export.py`.
"""
