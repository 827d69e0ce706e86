"""unpack.py ARCHIVE STRIP OUT PATTERN...: files of a wheel or source archive whose path below STRIP matches a pattern."""
import fnmatch
import os
import shutil
import sys
import tarfile
import zipfile

archive, strip, out, *patterns = sys.argv[1:]


def take(name, opened):
    below = name[len(strip):]
    if not name.startswith(strip) or ".." in below.split("/") or below.startswith("/"):
        return
    if not any(fnmatch.fnmatchcase(below, p) for p in patterns):
        return
    target = os.path.join(out, below)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with opened() as source, open(target, "wb") as f:
        shutil.copyfileobj(source, f, 1 << 22)


if archive.endswith(".whl"):
    with zipfile.ZipFile(archive) as z:
        for info in z.infolist():
            if not info.is_dir():
                take(info.filename, lambda i=info: z.open(i))
else:
    with tarfile.open(archive) as t:
        for member in t:
            if member.isfile():
                take(member.name, lambda m=member: t.extractfile(m))
