"""Fitting: a model with another gated activation becomes ReLU without end-to-end training.

Layer by layer, on what the layers before it give (`fit.py`). A layer's gated FFN of N neurons
becomes one of N + R, all ReLU (`layer.py`): gates are shifted until few enough fire, some steps of
Adam move the layer's own weights (`steps.py`), and `W_down` and a linear map of the FFN's input are
solved for by least squares (`least_squares.py`). The map is cut to rank R and becomes R neurons
that always fire.
"""
