"""JupyterLab in Debian's Chromium, headless, as a student uses it: by clicks and keys."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Locator, Page, sync_playwright

CHROMIUM = "/usr/bin/chromium"
# The browser is root's in a namespace of its own, and looks up nothing outside.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update")
OPEN_S = 400  # a server or a kernel starts, on a busy machine
POLL_S = 0.25


@contextmanager
def chromium() -> Iterator:
    """A browser; `new_context` of it is a window whose cookies are its own."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class Lab:
    """One student's window."""

    def __init__(self, browser: object, url: str, user: str, width: int = 1280) -> None:
        context = browser.new_context(viewport={"width": width, "height": 900})
        context.set_default_timeout(OPEN_S * 1000)
        self.page: Page = context.new_page()
        self.page.on("dialog", lambda dialog: dialog.accept())  # "leave this page?"
        self.url, self.user = url, user

    def log_in(self, password: str) -> None:
        """Give name and password, and wait for JupyterLab."""
        self.page.goto(f"{self.url}/hub/login")
        self.page.fill("#username_input", self.user)
        self.page.fill("#password_input", password)
        self.page.click("#login_submit")
        self.page.wait_for_url("**/lab/**")
        self.page.wait_for_selector(".jp-Notebook")

    def log_out(self) -> None:
        """Leave; the server stays."""
        self.page.goto(f"{self.url}/hub/logout")
        self.page.wait_for_selector("#username_input")

    def open(self, name: str) -> None:
        """Open a notebook of the folder manyhands, and wait until its kernel is idle."""
        self.page.goto(f"{self.url}/user/{self.user}/lab/tree/manyhands/{name}.ipynb?reset")
        self.page.wait_for_selector(f".lm-TabBar-tab:has-text('{name}')")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.wait_idle()

    def menu(self, menu: str, item: str) -> None:
        """Choose from the menu bar."""
        self.page.click(f".lm-MenuBar-itemLabel:text-is('{menu}')")
        self.page.click(f".lm-Menu-itemLabel:text-is('{item}')")

    def run_all(self, limit_s: float) -> None:
        """Run all cells, and wait until the kernel is idle again."""
        self.menu("Run", "Run All Cells")
        time.sleep(1)  # until the cells are marked as waiting
        self.wait_idle(limit_s)

    def wait_idle(self, limit_s: float = OPEN_S) -> None:
        """Wait until no cell of the notebook waits or runs. TimeoutError after that."""
        end_s = time.monotonic() + limit_s
        quiet = 0
        while quiet < 4:
            waiting = self.page.locator(".jp-InputPrompt:text-is('[*]:')").count()
            idle = self.page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").count()
            quiet = quiet + 1 if idle and not waiting else 0
            if time.monotonic() > end_s:
                raise TimeoutError(f"{self.user}: {waiting} cells still wait after {limit_s:.0f} s")
            time.sleep(POLL_S)

    def cell(self, text: str) -> Locator:
        """The first code cell in which this text stands."""
        inside = self.page.locator(".cm-content", has_text=text)
        return self.page.locator(".jp-CodeCell", has=inside).first

    def write(self, cell: Locator, code: str) -> None:
        """Replace what stands in a cell."""
        editor = cell.locator(".cm-content")
        editor.scroll_into_view_if_needed()
        editor.click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(code)

    def run(self, cell: Locator, limit_s: float = OPEN_S) -> str:
        """Run a cell as Ctrl+Enter does; what it shows."""
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        time.sleep(0.5)  # until the cell is marked as waiting
        self.wait_idle(limit_s)
        return self.shown(cell)

    def shown(self, cell: Locator) -> str:
        """The text of a cell's outputs."""
        return "\n".join(cell.locator(".jp-OutputArea-output").all_inner_texts())

    def add_cell(self, after: Locator, code: str) -> Locator:
        """A new cell below another one."""
        after.locator(".jp-InputPrompt").first.click()
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("b")
        self.page.keyboard.press("Enter")
        self.page.keyboard.insert_text(code)
        return self.cell(code.splitlines()[0])

    def save(self) -> None:
        """Save the notebook."""
        self.page.keyboard.press("Escape")
        self.page.keyboard.press("Control+s")
        self.page.wait_for_selector(".lm-TabBar-tab.lm-mod-current:not(.jp-mod-dirty)")

    def picture(self, path: Path) -> None:
        """What the window shows, as a PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path)
