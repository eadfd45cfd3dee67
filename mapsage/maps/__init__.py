"""Maps of images and scenes of any size: windows in, blended class maps out.

`Prediction` (`prediction.py`) is the whole work of one process: rank 0 plans, every
rank predicts its strips and writes its maps (`map_job.py`). The model is behind the protocol
`MapModel` (`map_model.py`), so nothing here starts a device or a process group; that is done by
`mapsage/commands/checkpoint_model.py`. Modules are imported by their own names, because an exported
model must work on machines without PyTorch.
"""
