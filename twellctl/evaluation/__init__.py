"""How good a model is: loss and agreement on text, and multiple-choice tasks.

windows -> losses     one pass over text: what fires, and the loss of each token, for a profile
windows -> text       the same pass: cross-entropy, agreement with a reference
questions -> choices  tasks in local files, answered by likelihood
harness               tasks of lm-evaluation-harness, answered by the same model
results               what all of them report
"""
