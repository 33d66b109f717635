"""Entries of `Info.plist`: identity of the application for macOS, and the file type GGUF that it can open.

GGUF has no registered type on macOS. The type is declared as imported and not as exported, so that a declaration of its
owners would take precedence. With `Alternate` the application does not replace the program that a user has chosen.
"""

from __future__ import annotations

IDENTIFIER = "io.github.layerdeck.layerdeck"
MODEL_TYPE = "org.ggml.gguf"
INFO: dict[str, object] = {
    "CFBundleDisplayName": "Layerdeck",
    "CFBundleName": "Layerdeck",
    "LSApplicationCategoryType": "public.app-category.developer-tools",
    "LSMinimumSystemVersion": "12.0",
    "NSHighResolutionCapable": True,
    "NSLocalNetworkUsageDescription": "Layerdeck speaks to the workers on other computers that you add.",
    "CFBundleDocumentTypes": [
        {
            "CFBundleTypeName": "GGUF language model",
            "CFBundleTypeRole": "Viewer",
            "LSHandlerRank": "Alternate",
            "LSItemContentTypes": [MODEL_TYPE],
        }
    ],
    "UTImportedTypeDeclarations": [
        {
            "UTTypeIdentifier": MODEL_TYPE,
            "UTTypeDescription": "GGUF language model",
            "UTTypeConformsTo": ["public.data"],
            "UTTypeTagSpecification": {
                "public.filename-extension": ["gguf"],
                "public.mime-type": ["application/x-gguf"],
            },
        }
    ],
}
