# Sourced by the other tools: makes .venv with the project and the given extras, once, and says what it installs.
#   source tools/environment.sh; make_environment dev
# A stamp in .venv remembers what was installed, so that a second call takes no time.

make_environment() {
    local extras="$1" stamp wanted
    cd "$(dirname "${BASH_SOURCE[0]}")/.." || return 1
    stamp=".venv/.installed-${extras//,/-}"
    wanted="$(cat pyproject.toml tools/constraints.txt | cksum) $PWD"
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$wanted" ]]; then
        return 0
    fi
    if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "creditgraph: python3 is $(python3 --version 2>&1); wanted 3.11 or newer. Install it and put it first in PATH." >&2
        return 1
    fi
    if [[ ! -x .venv/bin/python ]]; then
        echo "Making .venv with $(python3 --version)"
        python3 -m venv .venv || {
            echo "creditgraph: python3 -m venv failed; on Debian or Ubuntu install it with: apt-get install python3-venv" >&2
            return 1
        }
    fi
    echo "Installing creditgraph[$extras] and the tested versions of tools/constraints.txt into .venv (a few minutes the first time)"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --upgrade "pip>=25" "setuptools>=77" || return 1
    # torch first and pinned: a pinned version takes a local CPU build where pip's find-links offers one.
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$(grep '^torch==' tools/constraints.txt)" || return 1
    .venv/bin/python -m pip install -qq --disable-pip-version-check --constraint tools/constraints.txt --editable ".[$extras]" || return 1
    echo "$wanted" >"$stamp"
}
