"""All notebooks on a hub, as a class of twenty meets them: `make hub NIGHTLY=1`, or ONLY=ddp.

Each of twenty students has a notebook, light or dark, in a window of 1280 or 800 pixels: it runs
from top to bottom with nothing done yet, its slider is moved, and in the lessons with a job a long
one is shown while it runs, and stopped. Pictures are left in runs/hub/.
"""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from browser import Lab, chromium
from hub_scene import ROOT, password, run

WIDTHS = (1280, 800)
THEMES = ("JupyterLab Light", "JupyterLab Dark")
RUN_S = 3600  # for a whole notebook beside nineteen others
STEPS = 3000  # of a job that is stopped long before
ERROR = ".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']"
CARD = ".jp-OutputArea-output div[style*='border-left']"


def plan(students: list[str], only: str) -> list[tuple[str, str, int, str]]:
    """(student, notebook, width, theme): each notebook once at least, and each width and theme."""
    found = sorted(path.stem for path in (ROOT / "notebooks").glob(f"*{only}*.ipynb"))
    if not found:
        raise ValueError(f"no notebook has {only!r} in its name")
    places = []
    for number, student in enumerate(students if not only else students[: 4 * len(found)]):
        width, theme = WIDTHS[number % 2], THEMES[number // 2 % 2]
        notebook = found[number % len(found)] if not only else found[number // 4]
        places.append((student, notebook, width, theme))
    return places


def choose_theme(student: str, theme: str) -> None:
    """As a student does once in the menu Settings."""
    folder = Path("/home", student, ".jupyter/lab/user-settings/@jupyterlab/apputils-extension")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    run("chown", "-R", f"{student}:students", Path("/home", student, ".jupyter"))


def move_slider(lab: Lab) -> str:
    """Move the first slider with a key; what was seen, or Wrong. A notebook may have none."""
    handle = lab.page.locator(".jupyter-widgets .noUi-handle").first
    if not handle.count():
        return "no slider"
    picture = lab.page.locator(".jupyter-widgets img").first
    before = picture.get_attribute("src")
    handle.scroll_into_view_if_needed()
    handle.press("ArrowRight")
    lab.page.wait_for_function(
        "before => document.querySelector('.jupyter-widgets img').src !== before", arg=before
    )
    return "slider moved"


def watch_and_stop(lab: Lab, notebook: str, picture: Path) -> str:
    """Start a long job in a cell of its own, see its panel, press Stop; what was said."""
    first = lab.page.locator(".jp-CodeCell").first
    job = f'watch.run("../sbatch/{notebook[3:]}.sbatch", "--steps", {STEPS}, ranks=2)'
    cell = lab.add_cell(first, f"from manyhands.jobs import watch\n{job}  # to be stopped")
    cell.locator(".cm-content").click()
    lab.page.keyboard.press("Control+Enter")
    cell.locator(CARD).filter(has_text=re.compile(r"step\s+\d")).first.wait_for()
    lab.picture(picture)
    cell.locator(".jp-InputPrompt").first.click()
    lab.page.keyboard.press("Escape")
    lab.page.keyboard.press("i")
    lab.page.keyboard.press("i")
    lab.wait_idle()
    said = lab.shown(cell)
    if "was interrupted" not in said:
        raise AssertionError(f"Stop does not end {notebook}'s job: {said[-600:]!r}")
    return "job shown and stopped"


def visit(url: str, place: tuple[str, str, int, str], seen: Path) -> str:
    """A student's way through a notebook; one line, or an error."""
    student, notebook, width, theme = place
    begin_s, told = time.monotonic(), [f"{student}: {notebook}, {width} px, {theme.split()[-1]}"]
    with chromium() as browser:
        lab = Lab(browser, url, student, width)
        lab.log_in(password(student))
        lab.open(notebook)
        lab.run_all(RUN_S)
        errors = lab.page.locator(ERROR).all_inner_texts()
        if errors:
            raise AssertionError(f"{notebook} with nothing done: {errors[0][:600]!r}")
        if "Dark" in theme:
            lab.page.wait_for_selector("body[data-jp-theme-light='false']")
        cards = lab.page.locator(CARD)
        boxes = [cards.nth(number).bounding_box() for number in range(cards.count())]
        wide = [box for box in boxes if box and box["x"] + box["width"] > width]
        if wide:
            raise AssertionError(f"{notebook}: a card ends beyond {width} px: {wide[0]}")
        told.append(f"{len(boxes)} cards")
        told.append(move_slider(lab))
        lab.picture(seen / f"tour-{notebook}-{width}-{theme.split()[-1]}.png")
        if notebook[3:] == "ddp":
            told.append(watch_and_stop(lab, notebook, seen / f"tour-job-{width}.png"))
    return f"{', '.join(told)}, {time.monotonic() - begin_s:.0f} s"


def tour(url: str, seen: Path, students: list[str], only: str) -> list[str]:
    """All visits, two a core at a time while all servers stay; what went wrong."""
    places, found = plan(students, only), []
    for student, _, _, theme in places:
        choose_theme(student, theme)
    with ThreadPoolExecutor(2 * os.cpu_count()) as pool:
        for place, future in [(place, pool.submit(visit, url, place, seen)) for place in places]:
            try:
                print(future.result(), flush=True)
            except Exception as error:
                found.append(f"{place}: {error}")
                print(f"FAILED {found[-1]}", flush=True)
    return found
