#!/bin/sh
# THIS SCRIPT HAS NOT BEEN RUN YET: it was written from the manuals of Apple and PyInstaller, without a Mac.
#
# Makes Layerdeck.app, signs it, has Apple notarise it, and packs it as a disk image: resources/macos/pack.sh
# Needs a Mac with Xcode's command line tools, and a set-up (python3 make.py setup).
#   SIGNING_IDENTITY   "Developer ID Application: NAME (TEAM)" as `security find-identity -v` lists it; without one the
#                      application is signed ad hoc, and other Macs warn of it
#   NOTARY_PROFILE     what `xcrun notarytool store-credentials` was told; without it nothing is sent to Apple
set -eu
cd "$(dirname -- "$0")/../.."
python=.venv/bin/python
app=dist/Layerdeck.app
version=$("$python" -c 'from importlib.metadata import version; print(version("layerdeck"))')
image="dist/Layerdeck-$version-$(uname -m).dmg"

# The icon in all sizes that macOS asks for, from our SVG.
icons=build/bundle/layerdeck.iconset
rm -rf "$icons" && mkdir -p "$icons"
for size in 16 32 128 256 512; do
    for scale in 1 2; do
        name="icon_${size}x${size}$([ "$scale" = 2 ] && echo @2x || true).png"
        "$python" -c "
import sys
from pathlib import Path
from resources.bundle.desktop_files import draw_icon
draw_icon(Path('resources/layerdeck.svg'), $size * $scale, Path('$icons/$name'))
"
    done
done
iconutil --convert icns --output build/bundle/layerdeck.icns "$icons"

# With the portable engine: the set-up's own is compiled for this Mac's processor alone. How its libraries find each
# other ($ORIGIN in resources/packs/recipes.py) is Linux's word; here it is @loader_path, and has to be tried.
python3 make.py bundle

# From the inside out: what is inside has to be signed before what it is in.
sign() {
    codesign --force --timestamp --options runtime --entitlements resources/macos/entitlements.plist \
        --sign "${SIGNING_IDENTITY:--}" "$@"
}
find "$app/Contents" -type f \( -name '*.dylib' -o -name '*.so' \) | while read -r library; do sign "$library"; done
sign "$app"
codesign --verify --deep --strict "$app"

rm -f "$image"
hdiutil create -volname Layerdeck -srcfolder "$app" -format UDZO "$image"
if [ -n "${SIGNING_IDENTITY:-}" ]; then sign "$image"; fi
if [ -n "${NOTARY_PROFILE:-}" ]; then
    xcrun notarytool submit "$image" --keychain-profile "$NOTARY_PROFILE" --wait
    xcrun stapler staple "$image"
    spctl --assess --type open --context context:primary-signature "$image"
fi
echo "$image"
