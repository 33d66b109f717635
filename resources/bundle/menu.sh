#!/bin/sh
# Adds Layerdeck, unpacked here, to the menu of this user, or takes it out again: add-to-menu [--remove]
# Models, chats and settings stay where they are: ~/.local/share/layerdeck and ~/.config/layerdeck.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
share=${XDG_DATA_HOME:-$HOME/.local/share}
cd "$here/share"
if [ "${1:-}" = "--remove" ]; then
    find . -type f | while read -r file; do rm -f -- "$share/$file"; done
    echo "Layerdeck is no longer in the menu. Models and chats are kept in $share/layerdeck."
else
    find . -type f | while read -r file; do
        mkdir -p -- "$share/$(dirname -- "$file")"
        cp -- "$file" "$share/$file"
    done
    # The menu is told where this copy lies; a path with spaces is quoted.
    sed -i -e "s|^Exec=layerdeck|Exec=\"$here/layerdeck\"|" -e "s|^TryExec=.*|TryExec=$here/layerdeck|" \
        "$share/applications/layerdeck.desktop"
    echo "Layerdeck is in the menu. \"$here/add-to-menu\" --remove takes it out again."
fi
for command in "update-desktop-database $share/applications" "update-mime-database $share/mime" \
    "gtk-update-icon-cache -q -t $share/icons/hicolor"; do
    if command -v "${command%% *}" > /dev/null; then ${command%% *} ${command#* } > /dev/null 2>&1 || true; fi
done
