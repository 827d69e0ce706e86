"""Runs the tests of llama.cpp's server before the gateway, as llama-cpp-python ships them.

Arguments: the folder of the built programs, and the model of 260,000 weights. `known.txt` has the tests that cannot pass, with the
reasons. A test that fails and is not there fails this program, and so does one that is there and passes.
"""
import glob, os, socket, subprocess, sys, tarfile

PACKAGE = "llama-cpp-python==0.3.36"
FILES = ["test_basic.py", "test_chat_completion.py", "test_compat_anthropic.py", "test_compat_oai_responses.py", "test_security.py"]
HERE = os.path.dirname(os.path.abspath(__file__))
# The template that llama.cpp takes for a model without one.
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def fetch(folder):
    """The tests' folder. The package's own build is never run: only its archive is wanted."""
    tests = f"{folder}/tests"
    if not os.path.isdir(tests):
        environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        download = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", folder, PACKAGE]
        subprocess.run([sys.executable, *download], env=environment, check=True)
        (archive,) = glob.glob(f"{folder}/*.tar.gz")
        with tarfile.open(archive) as files:
            for member in files:
                _, inside, path = member.name.partition("/vendor/llama.cpp/tools/server/tests/")
                if inside and member.isfile():
                    member.name = path
                    files.extract(member, tests + ".part", filter="data")
        os.remove(archive)
        os.rename(tests + ".part", tests)
    return tests


def known():
    """Tests that cannot pass, by their reason: a line that begins with # is the reason of those after it."""
    tests, reason = {}, None
    with open(f"{HERE}/known.txt") as lines:
        for line in map(str.strip, lines):
            if line.startswith("# "):
                reason = line[2:]
            elif line:
                tests[line] = reason
    return tests


class Watch:
    """Collects outcomes, and stops the servers that a test leaves."""

    def __init__(self):
        self.outcomes = {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.removeprefix("unit/")
        self.outcomes[name] = self.outcomes.get(name, True) and not report.failed

    def pytest_runtest_teardown(self):
        import utils

        for server in set(utils.server_instances):
            server.stop()


def main():
    programs, model = sys.argv[1:]
    folder = os.path.join(os.path.dirname(os.path.dirname(sys.executable)), "llama-server")
    os.makedirs(folder, exist_ok=True)
    tests, story = fetch(folder), f"{folder}/story.gguf"
    change = [f"{os.path.dirname(sys.executable)}/gguf-new-metadata", "--force", "--chat-template", TEMPLATE, model, story]
    subprocess.run(change, check=True, stderr=subprocess.DEVNULL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(ROCMFORGE_PROGRAMS=programs, ROCMFORGE_STORY=story, LLAMA_SERVER_BIN_PATH=f"{HERE}/stand_in.py", PORT=str(port))
    os.chdir(tests)
    sys.path.insert(0, tests)
    import pytest

    watch = Watch()
    pytest.main(["--noconftest", "-q", "-p", "no:cacheprovider", *(f"unit/{file}" for file in FILES)], plugins=[watch])
    listed, faults = known(), []
    # A line without parameters is for all of a test's.
    listing = lambda name: name if name in listed else name.partition("[")[0]
    for name, passed in watch.outcomes.items():
        if not passed and listing(name) not in listed:
            faults.append(f"{name} fails")
    for line in listed:
        of_line = [passed for name, passed in watch.outcomes.items() if listing(name) == line]
        if not of_line or any(of_line):
            faults.append(f"{line} is listed, and passes or is not there")
    passed = sum(watch.outcomes.values())
    print(f"{passed} of {len(watch.outcomes)} tests pass; {len(watch.outcomes) - passed} cannot, for {len(set(listed.values()))} reasons")
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
