"""comgr.py FOLDER: reads FOLDER/<target>.co with AMD's own code object manager and compares with FOLDER/<target>.json.

The HIP runtime reads code objects through this library. The script checks for each object: the architecture that the
library reports, whether it finds the object for a device of that architecture, and the arguments of every kernel in the
metadata. The first two checks need an architecture that this version knows; the others are listed as unknown. Old versions
(2.4, of ROCm 5.2) refuse code objects of version 5: they are given version 4, whose header flags mean the same.
<target>.json holds the kernels that Rust launches there: {kernel: [[offset, size, is a pointer], ...]}.

Prints one JSON object: version, whether it reads version 5, number of kernels, targets known and unknown, faults.
"""
import ctypes
import json
import pathlib
import sys

LIBRARIES = ["libamd_comgr.so.3", "libamd_comgr.so.2", "libamd_comgr.so"]
# AMD_COMGR_DATA_KIND_EXECUTABLE
EXECUTABLE = 8
# Position of the code object version in the ELF header, and its values.
VERSION_AT, VERSION_4, VERSION_5 = 8, 2, 3
TRIPLE = "amdgcn-amd-amdhsa--"

Handle, Size = ctypes.c_uint64, ctypes.c_size_t


class Found(ctypes.Structure):
    """amd_comgr_code_object_info_t"""
    _fields_ = [("isa", ctypes.c_char_p), ("size", Size), ("offset", ctypes.c_uint64)]


class Failed(Exception):
    pass


def load():
    said = []
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            said.append(str(error))
    sys.exit("no libamd_comgr: " + "; ".join(said))


comgr = load()


def call(name, *arguments):
    status = getattr(comgr, "amd_comgr_" + name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        comgr.amd_comgr_status_string(status, ctypes.byref(text))
        raise Failed(f"{name}: {(text.value or b'?').decode()}")


def out(kind, name, *arguments):
    """Returns the value that a function writes to its last argument."""
    value = kind()
    call(name, *arguments, ctypes.byref(value))
    return value.value


def text(name, *arguments):
    """Returns the text of a function that first reports its length."""
    size = Size()
    call(name, *arguments, ctypes.byref(size), None)
    room = ctypes.create_string_buffer(size.value)
    call(name, *arguments, ctypes.byref(size), room)
    return room.value.decode()


def entry(node, key):
    value = Handle()
    call("metadata_lookup", Handle(node), key.encode(), ctypes.byref(value))
    return value.value


def string(node, key):
    return text("get_metadata_string", Handle(entry(node, key)))


def items(node):
    for index in range(out(Size, "get_metadata_list_size", Handle(node))):
        yield out(Handle, "index_list_metadata", Handle(node), Size(index))


def known():
    """Returns the architectures that this library knows."""
    count = out(Size, "get_isa_count")
    names = (out(ctypes.c_char_p, "get_isa_name", Size(index)) for index in range(count))
    return {name.decode().removeprefix(TRIPLE) for name in names}


def arguments(kernel):
    for argument in items(entry(kernel, ".args")):
        kind = string(argument, ".value_kind")
        # The runtime fills in hidden arguments itself.
        if not kind.startswith("hidden_"):
            yield [int(string(argument, ".offset")), int(string(argument, ".size")), kind == "global_buffer"]


def kernels(data):
    root = out(Handle, "get_data_metadata", data)
    found = {}
    for kernel in items(entry(root, "amdhsa.kernels")):
        name = string(kernel, ".name")
        if name in found:
            raise Failed(f"two kernels are called {name}")
        if string(kernel, ".symbol") != name + ".kd":
            raise Failed(f"{name} has the symbol {string(kernel, '.symbol')}")
        found[name] = list(arguments(kernel))
    call("destroy_metadata", Handle(root))
    return found


def opened(code):
    data = Handle(out(Handle, "create_data", EXECUTABLE))
    call("set_data", data, Size(len(code)), code)
    return data


def takes_version_5(code):
    """Returns whether this library reads version 5; `code` must be for an architecture that it knows."""
    def is_read(version):
        data = opened(code[:VERSION_AT] + bytes([version]) + code[VERSION_AT + 1:])
        try:
            return bool(text("get_data_isa_name", data))
        except Failed:
            return False
        finally:
            call("release_data", data)
    return is_read(VERSION_5) or not is_read(VERSION_4)


def architecture(target, code):
    """Yields faults in how the library reads the object as a whole."""
    data = opened(code)
    isa = text("get_data_isa_name", data)
    if isa != TRIPLE + target:
        yield f"is for {isa}"
    # The runtime makes the same query: the object for this device, if there is one.
    query = (Found * 1)(Found((TRIPLE + target).encode(), 0, 0))
    call("lookup_code_object", data, query, Size(1))
    if (query[0].offset, query[0].size) != (0, len(code)):
        yield f"{query[0].size} bytes at {query[0].offset} were found for the device, but the object has {len(code)} at 0"
    call("release_data", data)


def launches(have, want):
    """Yields faults of its kernels."""
    for name in sorted(want.keys() | have.keys()):
        if name not in have:
            yield f"{name} is launched but not in the object"
        elif name not in want:
            yield f"{name} is in the object but never launched"
        elif have[name] != want[name]:
            yield f"{name} takes {have[name]}, Rust packs {want[name]}"


def faults(target, code, want, is_known):
    if is_known:
        yield from architecture(target, code)
    data = opened(code)
    yield from launches(kernels(data), want)
    call("release_data", data)


def main():
    folder = pathlib.Path(sys.argv[1])
    codes = {path.stem: path.read_bytes() for path in sorted(folder.glob("*.co"))}
    launched = {target: json.loads((folder / f"{target}.json").read_text()) for target in codes}
    targets = known()
    major, minor = Size(), Size()
    comgr.amd_comgr_get_version(ctypes.byref(major), ctypes.byref(minor))
    report = {"version": f"{major.value}.{minor.value}", "kernels": max(map(len, launched.values())), "known": [], "unknown": [], "faults": []}
    report["takes_version_5"] = all(takes_version_5(code) for target, code in codes.items() if target in targets)
    for target, code in codes.items():
        is_known = target in targets
        report["known" if is_known else "unknown"].append(target)
        if code[VERSION_AT] == VERSION_5 and not report["takes_version_5"]:
            code = code[:VERSION_AT] + bytes([VERSION_4]) + code[VERSION_AT + 1:]
        try:
            report["faults"] += [f"{target}: {fault}" for fault in faults(target, code, launched[target], is_known)]
        except Failed as error:
            report["faults"].append(f"{target}: {error}")
    print(json.dumps(report))


main()
