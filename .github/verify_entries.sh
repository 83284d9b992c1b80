#!/bin/sh
# Verifies a pull request to a board with the code of its base, which is checked out:
# .github/verify_entries.sh MERGED [words of scripts/track.py]     MERGED: the commit of the base and the request
set -eu
merged=$1
shift
changed=$(git diff --name-only --no-renames HEAD "$merged")
others=$(printf '%s\n' "$changed" | grep -vE '^(README\.md|results/[^/]+/(README\.md|board\.csv|rates\.svg|entries/.+))$' || true)
if [ -n "$others" ]; then
  echo "failed: a board changes in a pull request of its own, without" $others
  exit 1
fi
runs() { git ls-tree -r "$1" results/ | awk '$4 ~ "^results/[^/]+/entries/[^/]+/runs[.]csv$" { print $3 }'; }
kept=$(runs "$merged")
for run in $(runs HEAD); do
  case "$kept" in *"$run"*) ;; *) echo "failed: the runs.csv of an entry is gone, or was changed: git show $run"; exit 1 ;; esac
done
git restore --source="$merged" --staged --worktree .
track="python $(dirname "$0")/../scripts/track.py"
status=0
for board in $(printf '%s\n' "$changed" | sed -nE 's|^results/([^/]+)/.*|\1|p' | sort -u); do
  $track "sweep=$board" "$@"  # rebuilds it
done
git diff --exit-code || status=1
for entry in $(printf '%s\n' "$changed" | sed -nE 's|^results/([^/]+)/entries/([^/]+)/.*|\1/\2|p' | sort -u); do
  $track "sweep=${entry%/*}" "verify=${entry#*/}" repeat=true "$@" || status=1
done
exit $status
