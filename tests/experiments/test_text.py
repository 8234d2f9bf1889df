"""The text of the experiments as its command prepares it, from packages made here."""

import shutil
import subprocess
import tarfile

import pytest

from experiments import text
from experiments.pack import read_manifest, read_pack
from experiments.text import Source, debian_copyright, python_licence
from gla_ext.train.data import load_corpus

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
SOURCES = (Source("manual", "**/*.txt"), Source("more", "**/*.txt", joined=False))


def make_package(folder, name, files, link=None):
    """A package of those files under usr/share/doc, its own folder there a link to another's."""
    root = folder / "roots" / name
    (root / "DEBIAN").mkdir(parents=True)
    about = f"Package: {name}\nVersion: 1.0\nArchitecture: all\nMaintainer: x <x@x>\n"
    (root / "DEBIAN/control").write_text(about + "Description: x\n")
    documentation = root / "usr/share/doc"
    documentation.mkdir(parents=True)
    for file, content in files.items():
        path = documentation / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if link:
        (documentation / name).symlink_to(link)
    (folder / "packages").mkdir(exist_ok=True)
    archive = folder / "packages" / f"{name}_1.0_all.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", root, archive]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path):
    """Where the packages of SOURCES lie, downloaded already, and that of the kernel's sources."""
    make_package(tmp_path, "manual", {"manual/1.txt": b"one\n", "manual/copyright": b"of manual"})
    make_package(tmp_path, "more", {"html/2.txt": b"two\n"}, link="more-data")
    make_package(tmp_path, "more-data", {"more-data/copyright": b"of more-data"})
    kernel = tmp_path / "linux/fs/file.c"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"int x;\n")
    with tarfile.open(tmp_path / "linux-source-6.1.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "linux", "linux-source-6.1")
    source = (tmp_path / "linux-source-6.1.tar.xz").read_bytes()
    files = {"../../src/linux-source-6.1.tar.xz": source, f"{text.KERNEL}/copyright": b"GPL"}
    make_package(tmp_path, text.KERNEL, files)
    return tmp_path


def test_every_source_has_its_licence(folder, monkeypatch):
    """Even if its documentation is a link to that of a package that is not read otherwise."""
    monkeypatch.setattr(text, "SOURCES", SOURCES)
    monkeypatch.setattr(text, "load_corpus", lambda: load_corpus(max_bytes=20_000))
    said = []
    pack = text.prepare(folder, said.append)
    assert pack == folder / text.PACK.name and str(pack) in said[-1]
    manifest, corpus = read_manifest(pack), read_pack(pack)
    names = {name for name, _ in corpus.train + corpus.held_out}
    assert {"prose/manual/usr/share/doc/manual", "prose/more/usr/share/doc/html/2.txt"} < names
    assert "code/linux/fs/file.c" in names
    assert any(name.startswith("code/python/") for name in names)
    with tarfile.open(pack) as archive:
        licences = {
            name.removeprefix("licences/"): archive.extractfile(name).read()
            for name in archive.getnames()
            if name.startswith("licences/")
        }
    assert licences.keys() == manifest["sources"].keys()
    assert licences["manual"] == b"of manual"
    assert licences["more"] == b"of more-data"
    assert licences[text.KERNEL] == b"GPL"
    assert licences["python"] == python_licence()
    assert b"PYTHON SOFTWARE FOUNDATION" in licences["python"].upper()


def test_a_package_without_a_licence_is_refused(folder):
    make_package(folder, "bare", {"bare/1.txt": b"one\n"})
    with pytest.raises(ValueError, match=r"^expected bare to hold usr/share/doc/bare/copyright"):
        debian_copyright("bare", folder)
