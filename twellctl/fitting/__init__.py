"""Fitting: a model with another gated activation becomes ReLU without end-to-end training.

A walk goes over the layers, each on what the layers before it give (`walk.py`), and a method
changes the layer that it stands at (`method.py`). The method here makes FFNs ReLU (`relu.py`): a
layer's gated FFN of N neurons becomes one of N + R (`layer.py`). Gates are shifted until few enough
fire, some steps of Adam move the layer's own weights (`steps.py`), and `W_down` and a linear map of
the FFN's input are solved for by least squares (`least_squares.py`). The map is cut to rank R and
becomes R neurons that always fire.
"""
