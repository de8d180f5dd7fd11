"""The engine of all checks: an exercise is a `Spec`, and a verdict follows from it.

spec.py      what an exercise is: truth, cases, what is observed, mistakes, hints
values.py    values as plain data: their kinds, when two are the same, how they differ
cases.py     unfriendly cases that every exercise can draw from
mistakes.py  mistakes as changes of the truth's source, and slips that any function can have
wire.py      what a rank sends, and a guard against messages that would hang
trial.py     answers tried on ranks: what each call shows there
verdict.py   the answer beside the truth and beside the mistakes; the words
"""
