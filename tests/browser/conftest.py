"""A headless Chromium, driven by the driver of the same distribution; nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all tests: to start it takes a second."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("there is no Chromium with its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "no-first-run", f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which root has none of
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    try:
        yield running
    finally:
        running.quit()
