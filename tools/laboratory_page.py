"""A hook of mkdocs that adds the laboratory to the site as laboratory.html."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from joma.report import laboratory

ADDRESS = "laboratory.html"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the page next to the site's start page, with links to the errata of the site."""
    content = laboratory.page(errata="errata/")
    files.append(File.generated(config, ADDRESS, content=content))
    return files
