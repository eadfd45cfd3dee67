"""Models as one ONNX file each: traced, rewritten for old runtimes, described and proved."""
