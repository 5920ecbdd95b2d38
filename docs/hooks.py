"""Generated pages of the site: reference, evidence and ``llms.txt``.

MkDocs calls the functions ``on_*``. The pages are generated at each build and are not written into the repository.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from mas_gym.internal.lazy import public_imports

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mas_gym", "search", "rewardmodels")
BARE_MODULES = (
    "mas_gym.errors",
    "mas_gym.internal.identity",
    "mas_gym.envs.sb3",
    "mas_gym.plugins",
    "mas_gym.tiny",
    "mas_gym.envs.vector",
    "search.credit",
)
"""Public modules that are not packages of names: everything that they define without an underscore."""

SUMMARIES: dict[str, tuple[str, str]] = {}
"""Title and first sentence of each page, for ``llms.txt``."""


def docstring(name: str) -> str:
    """Return the first paragraph of a module's docstring, without importing it."""
    place = ROOT.joinpath(*name.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]


def public_packages() -> dict[str, list[str]]:
    """Return each package that imports public names, and these names; the command line has none."""
    found = {}
    for top in PACKAGES:
        for path in sorted((ROOT / top).rglob("__init__.py")):
            name = ".".join(path.parent.relative_to(ROOT).parts)
            names = sorted(public_imports(path))
            if names and name != "mas_gym.cli":
                found[name] = names
    return found


def python_pages() -> Iterator[tuple[str, str, str]]:
    """Yield title, file and text of the reference page of each public package and module."""
    for package, names in public_packages().items():
        body = [f"# {package}\n", f"::: {package}\n    options: {{members: false, show_root_heading: false}}\n"]
        body += [f"::: {package}.{name}\n" for name in names]
        yield package, f"reference/{package}.md", "\n".join(body)
    for module in BARE_MODULES:
        yield (
            module,
            f"reference/{module}.md",
            f"# {module}\n\n::: {module}\n    options: {{show_root_heading: false}}\n",
        )


def command_pages() -> Iterator[tuple[str, str, str]]:
    """Yield the page of the command line, from the help of each command."""
    import typer.main

    from mas_gym.cli import app

    parts = [
        "# Command line\n",
        "Every command has the option `--help`. Global options precede the command; `--debug` may also follow it.\n",
    ]
    root: Any = typer.main.get_command(app)
    for words, command in commands(root, "mas-gym"):
        parts += command_lines(words, command)
    yield "Command line", "reference/cli.md", "\n".join(parts)


def commands(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    """Yield a command and all commands below it."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{words} {name}")


def command_lines(words: str, command: Any) -> list[str]:
    """Return the Markdown of one command's help."""
    lines = [f"## {words}\n", inspect.cleandoc(command.help or "").replace("\n", " ") + "\n"]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    if arguments:
        usage = " ".join(p.name.upper() for p in arguments)
        lines.append(f"Usage: `{words} [OPTIONS] {usage}`\n")
    lines += ["| option | meaning | default |", "|---|---|---|"]
    for parameter in command.params:
        names = ", ".join(parameter.opts) if parameter.param_type_name == "option" else parameter.name.upper()
        default = "" if parameter.default in (None, False, ()) else f"`{parameter.default}`"
        lines.append(f"| `{names}` | {cell(getattr(parameter, 'help', None) or '')} | {cell(default)} |")
    examples = (command.epilog or "").partition("Examples:")[2].split("\n\n")
    shown = [line.strip() for line in examples if line.strip()]
    if shown:
        lines += ["", "```console", *shown, "```"]
    return [*lines, ""]


def cell(text: str) -> str:
    """Return a text that fits in one table cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def store_pages() -> Iterator[tuple[str, str, str]]:
    """Yield the page of the store's tables, from the statements that create them."""
    from search.store.table_schema import TABLES

    parts = [
        "# Run store\n",
        "A run store is one SQLite file in WAL mode. Each finished search is one transaction. Read it with "
        "[`search.open_store`](search.md#search.open_store), with pandas ([how](../howto/read-store.md)) or with any "
        "SQLite client. The column `checksum` detects corrupt rows, and covers a search's document through `content`. "
        "Readers may ignore both. Rows must not be changed. A lone surrogate is written as U+001A and four hexadecimal "
        "digits.\n",
    ]
    for name, body in re.findall(r"CREATE TABLE (\w+) \((.*?)\n\)", TABLES, re.S):
        parts += [f"## {name}\n", "| column | type | meaning |", "|---|---|---|"]
        for line in body.strip().splitlines():
            declared, _, comment = line.partition("--")
            words = declared.strip().rstrip(",").split(maxsplit=1)
            if not words:
                # A comment on a separate line continues the previous comment.
                parts[-1] = f"{parts[-1].removesuffix(' |')} {cell(comment)} |"
            elif words[0].isupper():
                parts.append(f"| | | {cell(declared.strip().rstrip(','))} |")
            else:
                parts.append(f"| `{words[0]}` | {cell(' '.join(words[1:]))} | {cell(comment)} |")
        parts.append("")
    yield "Run store", "reference/store.md", "\n".join(parts)


def schema_pages(config: MkDocsConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the page of the MAS config, and the JSON Schema itself."""
    from mas_gym.systems.schema import json_schema

    schema = json_schema()
    text = json.dumps(schema, indent=2)
    parts = [
        "# MAS config\n",
        "A multi-agent system is a YAML or JSON file. `mas-gym new mas.yaml` writes a commented template and "
        "`mas-gym check mas.yaml` reports all errors, draws the graph and lists what each agent sees.\n",
        "Editors can complete and check these files with the [JSON Schema](mas.schema.json), which is generated from "
        "the validation rules. In VS Code with the YAML extension, add this first line:\n",
        "```yaml\n# yaml-language-server: $schema=mas.schema.json\n```\n",
        "and write the schema into the folder of the file with `mas-gym check --schema > mas.schema.json`.\n",
    ]
    tables = {"The file": schema, "An agent": schema["$defs"]["agent"]}
    for title, part in tables.items():
        parts += [f"## {title}\n", "| key | meaning | default |", "|---|---|---|"]
        for key, entry in part["properties"].items():
            needed = " Required." if key in part.get("required", ()) else ""
            default = f"`{entry['default']}`" if "default" in entry else ""
            parts.append(f"| `{key}` | {cell(entry.get('description', ''))}{needed} | {default} |")
        parts.append("")
    parts += ["## An edge\n", schema["$defs"]["edge"]["description"] + "\n", "## Example\n"]
    parts += ['```yaml\n--8<-- "mas_gym/configs/rpsv.yaml"\n```\n']
    yield "MAS config", "reference/mas-config.md", "\n".join(parts)
    yield "", "reference/mas.schema.json", text


def evidence_pages() -> Iterator[tuple[str, str, str | Path]]:
    """Yield the pages of the benchmarks, their pictures, and the log."""
    folder = ROOT / "benchmarks"
    pages = folder / "pages"
    for path in sorted(pages.rglob("*"), key=lambda p: (p.parent != pages, p.stem != "main", p.name)):
        uri = f"evidence/{path.relative_to(pages).as_posix()}"
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            group = "" if path.parent == pages else f"{path.parent.name}: "
            yield group + heading(text), uri, text.replace("](../LOG.md", "](log.md")
        elif path.suffix in (".png", ".svg"):
            yield "", uri, path
    log = (folder / "LOG.md").read_text(encoding="utf-8").replace("](pages/", "](")
    yield "Log", "evidence/log.md", log


def verdicts(name: str) -> str:
    """Return the count of each verdict in the table of differences of a page, such as ``2 holds, 1 undecided``."""
    text = (ROOT / "benchmarks" / "pages" / f"{name}.md").read_text(encoding="utf-8")
    found = re.findall(r"\| \*{0,2}(holds|beyond|below|undecided|contrary)\*{0,2} \|", text)
    return ", ".join(f"{found.count(word)} {word}" for word in dict.fromkeys(sorted(found))) or "no claim tested"


def heading(text: str) -> str:
    """Return the first heading of a page."""
    return next(line[2:].strip() for line in text.splitlines() if line.startswith("# "))


def changelog_pages() -> Iterator[tuple[str, str, str]]:
    """Yield the changelog, with the version that is installed and how to cite it."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    yield "Changelog and citation", "reference/changelog.md", f"{text}\n## Citation\n\n```yaml\n{citation}```\n"


def own_pages(folder: Path, nav: list[Any]) -> list[dict[str, str]]:
    """Return the how-to pages that the navigation does not name, so that a new page needs no entry."""
    named = json.dumps(nav)
    pages = [*sorted((folder / "howto").glob("*.md")), *sorted(folder.glob("*.md"))]
    uris = [path.relative_to(folder).as_posix() for path in pages]
    return [{heading((folder / uri).read_text("utf-8")): uri} for uri in uris if f'"{uri}"' not in named]


EXAMPLE = re.compile(r"^<!-- from: examples/([\w./]+) -->\n```(\w+)\n(.*?)^```$", re.M | re.S)
"""A block that shows an example file."""
LINK = re.compile(
    r'\]\((?:\.\./)+((?:benchmarks|mas_gym|search|rewardmodels|examples)/[\w./-]+)(#[\w-]+)?(?: "([\w.]+)")?\)'
)
"""A link to a file of the repository; a link to source code may state the public name that it means."""
GENERATED_FROM = {
    "mas_gym/systems/schema.py": "reference/mas-config.md",
    "search/store/table_schema.py": "reference/store.md",
    "benchmarks/LOG.md": "evidence/log.md",
}

GENERATED: dict[str, File] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages and enter them into the navigation."""
    # MkDocs restores the path after loading this file.
    sys.path.insert(0, str(ROOT))
    SUMMARIES.clear()
    GENERATED.clear()
    sections: dict[str, list[dict[str, str]]] = {"Reference": [], "Evidence": []}
    made = {
        "Reference": [*command_pages(), *schema_pages(config), *store_pages(), *python_pages(), *changelog_pages()],
        "Evidence": list(evidence_pages()),
    }
    for section, pages in made.items():
        for title, uri, content in pages:
            source = {"abs_src_path": str(content)} if isinstance(content, Path) else {"content": content}
            GENERATED[uri] = File.generated(config, uri, **source)
            if title:
                sections[section].append({title: uri})
    for path in sorted((ROOT / "examples").rglob("*.*")):
        if path.suffix in (".py", ".csv", ".yaml", ".jsonl", ".ipynb"):
            uri = path.relative_to(ROOT).as_posix()
            GENERATED[uri] = File.generated(config, uri, abs_src_path=str(path))
    sections["How to"] = own_pages(Path(config.docs_dir), config.nav or [])
    for entry in config.nav or []:
        for section in sections:
            if section in entry:
                entry[section] += sections[section]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated files."""
    for file in GENERATED.values():
        files.append(file)
    return files


def site_page(path: str, name: str | None) -> str:
    """Return the page of the site that shows a file of the repository, or a public name that the file defines."""
    if path in GENERATED_FROM:
        return GENERATED_FROM[path]
    if name:
        return f"reference/{name.rpartition('.')[0]}.md#{name}"
    if path.startswith("benchmarks/pages/"):
        return path.replace("benchmarks/pages", "evidence", 1)
    if path.endswith(".py") and not path.startswith("examples/"):
        return f"reference/{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}.md"
    return path


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the first paragraph for ``llms.txt``, fill in verdicts, and name the file of each example."""
    paragraphs = [p for p in re.split(r"\n\s*\n", markdown) if p and p[0] not in "#<`|:!-[?"]
    shown = re.search(r"^::: ([\w.]+)$", markdown, re.M)
    first = paragraphs[0] if paragraphs else docstring(shown[1]) if shown else ""
    SUMMARIES[page.url] = (str(page.title), " ".join(first.split()))
    up = "../" * page.file.src_uri.count("/")
    markdown = EXAMPLE.sub(rf'```\2 title="\1"\n\3```\n\n[Download \1]({up}examples/\1)', markdown)
    if page.file.src_uri not in GENERATED:
        markdown = LINK.sub(lambda link: f"]({up}{site_page(link[1], link[3])}{link[2] or ''})", markdown)
    return re.sub(r"\{verdicts (\w+)\}", lambda match: verdicts(match[1]), markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Write ``llms.txt``: each page with its address and first sentence."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += [f"- [{title}]({url}): {summary}" for url, (title, summary) in SUMMARIES.items()]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
