# THIS SCRIPT HAS NOT BEEN RUN YET: it was written from the manuals of Inno Setup and signtool, without a Windows machine.
#
# Makes the application in dist\layerdeck, signs it, and packs an installer: powershell resources\windows\pack.ps1
# Needs a set-up (py make.py setup), Inno Setup 6, and to sign the Windows SDK's signtool.
#   $env:SIGNING_THUMBPRINT   of a code signing certificate in the user's store; without one nothing is signed, and
#                             SmartScreen warns of the installer
#   $env:TIMESTAMP_SERVER     the address of a time stamp server (RFC 3161), which goes with the certificate
$ErrorActionPreference = "Stop"
Set-Location (Join-Path $PSScriptRoot "..\..")
$python = ".venv\Scripts\python.exe"

function Invoke-Checked {
    & $args[0] $args[1..($args.Length - 1)]
    if ($LASTEXITCODE -ne 0) { throw "$($args[0]) ended with $LASTEXITCODE" }
}

$version = & $python -c "from importlib.metadata import version; print(version('layerdeck'))"
$draw = "from pathlib import Path; from resources.bundle.desktop_files import draw_icon; " +
    "draw_icon(Path('resources/layerdeck.svg'), 256, Path('build/bundle/layerdeck.ico'))"
Invoke-Checked $python -c $draw
# With the portable engine: the set-up's own is compiled for this computer's processor alone. The run path in
# resources/packs/recipes.py ($ORIGIN) is Linux's; Windows looks beside each library by itself, which has to be tried.
Invoke-Checked py make.py bundle

$options = @("/DVersion=$version")
if ($env:SIGNING_THUMBPRINT) {
    $sign = @("sign", "/sha1", $env:SIGNING_THUMBPRINT, "/fd", "SHA256", "/tr", $env:TIMESTAMP_SERVER, "/td", "SHA256")
    Invoke-Checked signtool @sign "dist\layerdeck\layerdeck.exe" "dist\layerdeck\layerdeck-cli.exe"
    # `$f is the file, and `$q a quotation mark, in Inno Setup's words.
    $options += "/DSignTool=ours", "/Sours=signtool $($sign -join ' ') `$f"
}
Invoke-Checked ISCC @options "resources\windows\layerdeck.iss"
