#!/bin/sh
# Verifies the entries in which HEAD differs from BASE: .github/verify_entries.sh BASE [words of scripts/track.py]
set -eu
base=$1
shift
changed=$(git diff --name-only --diff-filter=d "$base...HEAD" -- 'results/*/entries/*/entry.yaml' 'results/*/entries/*/runs.csv' \
  'results/*/entries/*/provenance.json' | cut -d/ -f2,4 | sort -u)
status=0
for entry in $changed; do  # BOARD/NAME
  python "$(dirname "$0")/../scripts/track.py" "sweep=${entry%/*}" "verify=${entry#*/}" repeat=true "$@" || status=1
done
exit $status
