"""The engine of all checks: an exercise is a `Spec`, and a verdict follows from it.

what an exercise is
    spec.py       its truth, cases, what is observed, mistakes, hints
    tables.py     the grammar of its tables: mistakes, and what words of an error mean
    mistakes.py   a mistake is a change of the truth's source; slips of any function; two at once
    cases.py      unfriendly cases that every exercise can draw from
    watch.py      a model that writes down what an answer does with it
    values.py     values as plain data: their kinds, when two are the same, how they differ
from an answer to a verdict
    lesson.py     what a notebook calls: checks, hints, what is done
    exercise.py   one TODO, and when an answer is judged again or not at all
    answer.py     what a learner hands over, and what is still a stub
    verdict.py    the verdict, from the files below
    attempt.py    truth, answer and mistakes in the same cases; how long, how many; not judged
    trial.py      on the ranks: what each call shows there
    wire.py       what a rank sends, and a guard against messages that would hang
    naming.py     which mistake, or which two at once, shows what the answer shows
    words.py      what the verdict says
    card.py       how it looks, and the errors that carry it
a person's state
    progress.py   what was tried and done
    overview.py   all lessons: what is done, and what comes next
"""
