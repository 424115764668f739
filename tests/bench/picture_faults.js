// What is wrong with the texts of a page's pictures, as JSON in its title: texts that cross each other or leave their
// picture, that are too small, or too like the background.

const SMALLEST = 6; // CSS pixels, of the height of a line of glyphs
const CONTRAST = 4.5; // WCAG 2, level AA

function corners(glyphs) {
    // A text may be turned: its box in its own coordinates, then where that is on the screen.
    const box = glyphs.getBBox(), matrix = glyphs.getScreenCTM();
    return [[0, 0], [1, 0], [1, 1], [0, 1]].map(([right, down]) =>
        new DOMPoint(box.x + right * box.width, box.y + down * box.height).matrixTransform(matrix));
}

function apart(one, other) {
    // Two convex shapes are, if along the normal of some side they are.
    return [one, other].some(shape => shape.some((from, i) => {
        const to = shape[(i + 1) % shape.length], normal = [to.y - from.y, from.x - to.x];
        const along = points => points.map(p => (p.x * normal[0] + p.y * normal[1]) / Math.hypot(...normal));
        const [a, b] = [along(one), along(other)];
        return Math.max(...a) <= Math.min(...b) || Math.max(...b) <= Math.min(...a);
    }));
}

function luminance(colour) {
    const [r, g, b] = colour.match(/[\d.]+/g).slice(0, 3).map(x => x / 255)
        .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function background(element) {
    // Of the nearest that has one; without any a page is white.
    for (; element; element = element.parentElement) {
        const colour = getComputedStyle(element).backgroundColor;
        if (!/^rgba\(.*, 0\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
}

function faults() {
    const found = [];
    let texts = 0;
    for (const picture of document.querySelectorAll("svg")) {
        const paper = luminance(background(picture));
        const frame = picture.getBoundingClientRect(), name = picture.getAttribute("aria-label");
        const shown = [...picture.querySelectorAll('g[id*="text_"]')].flatMap(group => {
            const glyphs = group.querySelector("g[transform]");
            return glyphs && glyphs.getBBox().width ? [[group, glyphs, corners(glyphs)]] : [];
        });
        texts += shown.length;
        shown.forEach(([group, glyphs, at], i) => {
            const say = what => found.push(`${name}: ${group.id}: ${what}`);
            const height = Math.hypot(at[3].x - at[0].x, at[3].y - at[0].y);
            if (at.some(p => p.x < frame.left - 1 || p.x > frame.right + 1 || p.y < frame.top - 1 || p.y > frame.bottom + 1))
                say("leaves the picture");
            if (height < SMALLEST) say(`${height} px high`);
            const ink = luminance(getComputedStyle(glyphs.querySelector("path, use")).fill);
            const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
            if (contrast < CONTRAST) say(`contrast ${contrast}`);
            for (const [other, , where] of shown.slice(i + 1)) if (!apart(at, where)) say(`crosses ${other.id}`);
        });
    }
    return {texts, paper: luminance(background(document.body)), faults: found};
}

document.title = JSON.stringify(faults());
