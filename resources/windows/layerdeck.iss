; THIS SCRIPT HAS NOT BEEN RUN YET: it was written from the manual of Inno Setup 6, without a Windows machine.
;
; The installer: for one user without administrator's rights, or for all. Run by pack.ps1, which says where all lies.
; Models, chats and settings are in the user's folders, which neither installing nor uninstalling touches.

#ifndef Version
  #define Version "0.0.0"
#endif

[Setup]
AppId={{6C5B0B7E-5B0F-4F0B-9B9E-3D2C5F0D8A41}
AppName=Layerdeck
AppVersion={#Version}
AppPublisher=The Layerdeck developers
DefaultDirName={autopf}\Layerdeck
DisableProgramGroupPage=yes
PrivilegesRequired=lowest
PrivilegesRequiredOverridesAllowed=dialog
ArchitecturesAllowed=x64compatible
ArchitecturesInstallIn64BitMode=x64compatible
LicenseFile=..\..\LICENSE
OutputDir=..\..\dist
OutputBaseFilename=Layerdeck-{#Version}-windows-x86_64
SetupIconFile=..\..\build\bundle\layerdeck.ico
UninstallDisplayIcon={app}\layerdeck.exe
Compression=lzma2
SolidCompression=yes
ChangesAssociations=yes
#ifdef SignTool
SignTool={#SignTool}
SignedUninstaller=yes
#endif

[Files]
Source: "..\..\dist\layerdeck\*"; DestDir: "{app}"; Flags: recursesubdirs ignoreversion

[Icons]
Name: "{autoprograms}\Layerdeck"; Filename: "{app}\layerdeck.exe"; AppUserModelID: "Layerdeck.Layerdeck"

[Registry]
; Layerdeck can open models and is offered for them. Who opens them by default stays as it is: that is for people to
; choose in Windows' own settings.
Root: HKA; Subkey: "Software\Classes\Layerdeck.gguf"; ValueType: string; ValueData: "GGUF language model"; Flags: uninsdeletekey
Root: HKA; Subkey: "Software\Classes\Layerdeck.gguf\DefaultIcon"; ValueType: string; ValueData: "{app}\layerdeck.exe,0"
Root: HKA; Subkey: "Software\Classes\Layerdeck.gguf\shell\open\command"; ValueType: string; ValueData: """{app}\layerdeck.exe"" ""%1"""
Root: HKA; Subkey: "Software\Classes\.gguf\OpenWithProgids"; ValueType: string; ValueName: "Layerdeck.gguf"; ValueData: ""; Flags: uninsdeletevalue
Root: HKA; Subkey: "Software\Layerdeck\Capabilities"; ValueType: string; ValueName: "ApplicationName"; ValueData: "Layerdeck"; Flags: uninsdeletekey
Root: HKA; Subkey: "Software\Layerdeck\Capabilities"; ValueType: string; ValueName: "ApplicationDescription"; ValueData: "Places the layers of a language model on your devices"
Root: HKA; Subkey: "Software\Layerdeck\Capabilities\FileAssociations"; ValueType: string; ValueName: ".gguf"; ValueData: "Layerdeck.gguf"
Root: HKA; Subkey: "Software\RegisteredApplications"; ValueType: string; ValueName: "Layerdeck"; ValueData: "Software\Layerdeck\Capabilities"; Flags: uninsdeletevalue

[Run]
Filename: "{app}\layerdeck.exe"; Description: "Start Layerdeck"; Flags: nowait postinstall skipifsilent

[Messages]
ConfirmUninstall=Remove %1? Your models and conversations stay in %LOCALAPPDATA%\layerdeck.
