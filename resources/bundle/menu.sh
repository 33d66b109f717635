#!/bin/sh
# Adds Layerdeck, unpacked here, to the menu of this user, or takes it out again: add-to-menu [--remove]
# What the user has stays where it is: the text after --remove says where.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
share=${XDG_DATA_HOME:-$HOME/.local/share}
cd "$here/share"
if [ "${1:-}" = "--remove" ]; then
    find . -type f | while read -r file; do rm -f -- "$share/$file"; done
    echo "Layerdeck is no longer in the menu. Its files are in $here, which you may delete."
    echo "Chats and engine packs are kept in $share/layerdeck, settings in ${XDG_CONFIG_HOME:-$HOME/.config}/layerdeck."
    echo "Models stay where they are: in ${XDG_CACHE_HOME:-$HOME/.cache}/huggingface, or where you put them."
else
    find . -type f | while read -r file; do
        mkdir -p -- "$share/$(dirname -- "$file")"
        cp -- "$file" "$share/$file"
    done
    # The menu is told where this copy lies, by the rules of desktop entries: within quotation marks a backslash before
    # what a shell would read, every backslash twice, a percent sign twice. What sed would read itself comes last.
    string='s/\\/\\\\/g'
    for_sed='s/[\\&|]/\\&/g'
    quoted=$(printf '%s' "$here" | sed -e 's/[\\"`$]/\\&/g' -e "$string" -e 's/%/%%/g' -e "$for_sed")
    plain=$(printf '%s' "$here" | sed -e "$string" -e "$for_sed")
    # GLib looks for the program before it makes one percent sign of two, so that another program has to be the first.
    case $here in *%*) first="env " ;; *) first="" ;; esac
    sed -i -e "s|^Exec=layerdeck|Exec=$first\"$quoted/layerdeck\"|" -e "s|^TryExec=.*|TryExec=$plain/layerdeck|" \
        "$share/applications/layerdeck.desktop"
    echo "Layerdeck is in the menu. \"$here/add-to-menu\" --remove takes it out again."
fi
for command in "update-desktop-database $share/applications" "update-mime-database $share/mime" \
    "gtk-update-icon-cache -q -t $share/icons/hicolor"; do
    if command -v "${command%% *}" > /dev/null; then ${command%% *} ${command#* } > /dev/null 2>&1 || true; fi
done
