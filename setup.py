"""What pyproject.toml cannot say: the README as an index shows it, and the weights that a wheel holds."""

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
WEIGHTS = "squeezenet"
"""The folder of `data` that is in the wheel too: networks for data of one's own start from these."""


def readme_of(text: str, repository: str, version: str) -> str:
    """Return a README whose links hold away from the repository.

    Links and pictures name the files of this version at the repository's address. Without an address a link leaves its
    words, and a picture nothing.
    """
    name = r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)"
    if not repository:
        return re.sub(name, lambda found: "" if found[1] else found[2], text)
    kinds = {"!": "raw", "": "blob"}
    return re.sub(name, lambda f: f"{f[1]}[{f[2]}]({repository}/{kinds[f[1]]}/v{version}/{f[3]})", text)


class BuildWithWeights(build_py):
    """Copies the package, then the weights into it; an editable install finds them in `data`."""

    def run(self):
        """Build."""
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                ROOT / "data" / WEIGHTS, Path(self.build_lib) / "lockstep/weights" / WEIGHTS, dirs_exist_ok=True
            )


if __name__ == "__main__":
    repository = os.environ.get("LOCKSTEP_REPOSITORY", "").rstrip("/")
    version = re.search(r'__version__ = "(.+)"', (ROOT / "lockstep/version.py").read_text())[1]
    setup(
        cmdclass={"build_py": BuildWithWeights},
        long_description=readme_of((ROOT / "README.md").read_text(), repository, version),
        long_description_content_type="text/markdown",
        project_urls={"Repository": repository, "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md"}
        if repository
        else {},
    )
