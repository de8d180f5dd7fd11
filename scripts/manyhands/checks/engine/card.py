"""The card of a verdict, and the errors that carry one."""

import html
from dataclasses import dataclass

from manyhands.ranks.failures import OneLine

COLOURS = {
    "done": "0,158,115",
    "not started": "230,159,0",
    "not yet": "213,94,0",
    "not judged": "128,128,128",
    "given": "0,114,178",
}


class Wrong(Exception):
    """What a check saw, why that is wrong or what it comes from, and what to try."""

    def __init__(self, seen: str, why: str = "", hint: str = "") -> None:
        super().__init__(seen)
        self.seen, self.why, self.hint = seen, why, hint


class NotJudged(Exception):
    """The machine did not let a check finish, so nothing is known about the answer."""

    def __init__(self, seen: str, remedy: str = "Run the check again.") -> None:
        super().__init__(seen)
        self.remedy = remedy


class NotYet(OneLine, Exception):
    """Stops "Run all" at the mistake, with one line, which is a short one below a card."""

    def __init__(self, words: str, short: str = "") -> None:
        super().__init__(words)
        self.short = short

    def _render_traceback_(self) -> list[str]:
        return [self.short or str(self)]


@dataclass(frozen=True)
class Verdict:
    """The answer to a learner: a card in a browser, one plain line in a log."""

    todo: str
    name: str
    state: str  # done, not started, not yet, not judged, given
    seen: str = ""
    why: str = ""
    hint: str = ""

    def __repr__(self) -> str:
        reasons = " - ".join(part for part in (self.seen, self.why, self.hint) if part)
        return f"TODO {self.todo} {self.state}" + (f": {reasons}" if reasons else "")

    def _repr_html_(self) -> str:
        colour = COLOURS[self.state]
        parts = [f"<b>TODO {self.todo} {self.state}</b> <code>{html.escape(self.name)}</code>"]
        if self.state == "not started":
            parts.append(
                f"Write it in the cell above. Stuck? <code>check.hint('{self.todo}')</code>"
            )
        if self.state == "given":
            parts.append("The lesson goes on with the course's answer, which stands below.")
        for label, text in (("Seen", self.seen), ("Why", self.why), ("Try", self.hint)):
            if text:
                parts.append(f"<b>{label}:</b> {html.escape(text)}")
        style = f"border-left:6px solid rgb({colour});background:rgba({colour},.14)"
        return f'<div style="{style};padding:.5em .8em;margin:.3em 0">{"<br>".join(parts)}</div>'


@dataclass(frozen=True)
class SideBySide:
    """Two answers to one exercise: columns in a browser, one below the other in a log."""

    yours: str
    theirs: str

    def __repr__(self) -> str:
        return f"yours:\n\n{self.yours}\n\nthe course's:\n\n{self.theirs}"

    def _repr_html_(self) -> str:
        style = "flex:1 1 24em;min-width:0;overflow-x:auto;text-align:left"
        columns = [
            f'<div style="{style}"><b>{title}</b><pre>{html.escape(code)}</pre></div>'
            for title, code in (("Yours", self.yours), ("The course's", self.theirs))
        ]
        return f'<div style="display:flex;flex-wrap:wrap;gap:1em">{"".join(columns)}</div>'
