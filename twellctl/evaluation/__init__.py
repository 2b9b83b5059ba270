"""How good a model is: loss and agreement on text and on answers, and tasks.

windows -> text       one pass over text: what fires, cross-entropy, agreement with a reference
answers -> agreement  what models write, and how far two agree on what one of them wrote
questions -> choices  tasks in local files, answered by likelihood
questions -> written  those answered in the model's own words: blocks of code, numbers
programs              code of an answer and its tests, by python_parts; limited -> within runs it
hub_rows, sound_tasks lines as the hub has them; questions that say nothing are left out
subject               a model that all of them ask
results               what all of them report
"""
