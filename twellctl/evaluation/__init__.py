"""How good a model is: loss and agreement on text and on answers, and tasks.

windows -> text       one pass over text: what fires, cross-entropy, agreement with a reference
answers -> agreement  what models write, and how far two agree on what one of them wrote
questions -> choices  tasks in local files, answered by likelihood
questions -> written  those answered in the model's own words, and code: limited -> within runs it
subject               a model that all of them ask
results               what all of them report
"""
