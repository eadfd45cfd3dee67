"""The generator of synthetic aerial scenes that the demo trains on.

`demo_dataset.py`, `neighbor_scenes.py` and `crop_places.py` write the files. Scenes are drawn by
`demo_scenes.py`, which calls `landscape.py` and `settlement.py` to paint on a canvas of
`ground_canvas.py`. Every byte follows from a seed: a change in the order of random draws is a new
format of the data.
"""
