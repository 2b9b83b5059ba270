"""How good a model is: loss and agreement on text, and multiple-choice tasks.

windows -> text       one pass over text: what fires, cross-entropy, agreement with a reference
questions -> choices  tasks in local files, answered by likelihood
harness               tasks of lm-evaluation-harness, answered by the same model
results               what all of them report
"""
