"""Published versions lead to one another, as files too."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from scripts import versions

from tests.support.browsing import CHROMIUM, Visit, browser, playwright
from tests.website.built import site
from tests.website.pages import DOCS, ROOT

__all__ = ["browser"]  # a fixture

NAMES = ("dev", "v0.9.0", "v0.10.0")


def listed(folder: Path) -> list[str]:
    """Versions that the pages of a folder know."""
    (names,) = re.findall(r"^const versions = (.*);$", (folder / versions.LIST).read_text(), re.M)
    return list(json.loads(names))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Folders of versions, with the list that is built into each."""
    for name in NAMES:
        (tmp_path / name / "_static").mkdir(parents=True)
        shutil.copy(DOCS / versions.LIST, tmp_path / name / versions.LIST)
    (tmp_path / "other").mkdir()
    return tmp_path


def test_each_version_knows_all_the_newest_first(published: Path) -> None:
    assert listed(published / "dev") == [], "a site that is built alone has no other"
    versions.write(published)
    for name in NAMES:
        assert listed(published / name) == ["v0.10.0", "v0.9.0", "dev"]
    assert "url=v0.10.0/" in (published / "index.html").read_text()
    shutil.rmtree(published / "v0.10.0")
    versions.write(published)
    assert listed(published / "dev") == ["v0.9.0", "dev"]


def test_a_folder_without_versions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="Remedy: make site"):
        versions.write(tmp_path)


def test_the_workflow_names_versions_after_it_adds_one() -> None:
    steps = (ROOT / ".github/workflows/site.yml").read_text()
    assert steps.index('cp -r ../build/docs "$version"') < steps.index("scripts/versions.py .")


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
def test_the_header_leads_to_another_version(browser: playwright.Browser, tmp_path: Path) -> None:
    for name in ("dev", "v0.9.0"):
        shutil.copytree(site(), tmp_path / name)
    versions.write(tmp_path)
    visit = Visit(browser, tmp_path / "dev" / "guides" / "index.html")
    assert visit.page.get_by_label("Version", exact=True).input_value() == "dev"
    visit.page.get_by_label("Version", exact=True).select_option("v0.9.0")
    visit.page.wait_for_url("**/v0.9.0/index.html")
    assert visit.page.get_by_label("Version", exact=True).input_value() == "v0.9.0"
    assert visit.troubles == []
    alone = Visit(browser, site() / "index.html").page
    assert alone.get_by_label("Version", exact=True).count() == 0
